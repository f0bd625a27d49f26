"""Draft heads: small models that draft from the target's own hidden states. Importing it imports no torch."""

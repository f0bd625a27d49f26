"""Drafters: ways to guess the next tokens. They change speed, never the output's distribution."""

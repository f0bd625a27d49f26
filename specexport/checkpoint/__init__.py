"""Reading what people have: folders of safetensors, GGUF files, packed integers, LoRA adapters."""

"""Convert checkpoints from and to other formats, and start training from Hugging Face files."""

"""Takes a training step apart: its parts, what each part buys, its losses, its memory."""

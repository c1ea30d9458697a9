"""The GPU and its host: what they are, whose turn it is, how fast they are."""

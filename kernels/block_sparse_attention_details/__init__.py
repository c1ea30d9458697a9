"""Parts of block-sparse attention: the block mask, the walk over its lists, the backward pass."""

"""Parts that only the kernels of one family use: decoding attention."""

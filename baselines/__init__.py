"""The libraries the kernels are compared with, one library a file."""

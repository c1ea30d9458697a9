"""The stacks: one file each. A file names the parts that it has of its own."""

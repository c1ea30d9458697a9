"""The files that pass from one stage to another, or are kept."""

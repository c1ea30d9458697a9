"""A decoder-only transformer whose parts are handed in, to train and decode with any stack."""

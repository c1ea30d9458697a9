"""Processes that may die, and their parent's end."""

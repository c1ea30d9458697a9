"""Runs processes that may die, and holds their parent's end."""

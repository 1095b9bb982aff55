"""Checks of the operator against float64, of a GPU end to end."""

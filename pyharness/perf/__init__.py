"""Times of the operator and of its peers."""

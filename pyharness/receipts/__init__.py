"""Receipts: what they hold, how they are verified, shown and quoted."""

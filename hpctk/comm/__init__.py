"""Ranks that communicate: who they are, what they agree on, and how bytes get from one to another."""

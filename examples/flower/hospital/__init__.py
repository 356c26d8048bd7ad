"""Flower app of a federated study with m2lgdg."""

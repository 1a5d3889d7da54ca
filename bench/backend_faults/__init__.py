"""Faults that a vendor may make, written from the contract; ``bench/backend_mutations.py`` runs them."""

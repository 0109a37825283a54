"""Placing tables over the ranks of a trainer that keeps all rows: costs by table, a search, and a plan file."""

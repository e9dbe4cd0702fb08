"""The attention output over the visible entries, compared with that of the full cache."""

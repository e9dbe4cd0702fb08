"""The attention output over what rows see, against that of the full cache."""

"""What constraints cost: the optimum under each, and the best policies that obey it."""

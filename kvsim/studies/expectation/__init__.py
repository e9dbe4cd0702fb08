"""Expected Attention (arXiv 2510.00636): expected against observed attention, and queries."""

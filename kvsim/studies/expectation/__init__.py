"""Expected Attention (arXiv 2510.00636): is attention what it expects, are queries normal?"""

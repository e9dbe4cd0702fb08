"""AMS (arXiv 2605.23200): the segments that it cuts a cache into, and their quotas."""

"""Plans of heads, measured on traces (`kvsim heads`)."""

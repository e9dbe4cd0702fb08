"""Page *Fidelity*."""

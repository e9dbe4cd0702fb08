"""Learning from traces: scorers (`kvsim learn`) and plans of heads (`kvsim heads`)."""

"""Effects of a policy on a running model: likelihoods, divergences, answers, bytes."""

"""What a policy did to a running model: likelihoods, divergences, answers, bytes."""

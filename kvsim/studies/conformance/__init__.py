"""`kvsim conform`: what another implementation kept, judged by the definition of a policy."""

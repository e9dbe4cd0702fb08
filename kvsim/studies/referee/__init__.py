"""The referee: what another implementation kept, judged by the definition of a policy."""

"""Runs of a model under a policy: live (`closed`, `decoding`), or judged replays (`judging`)."""

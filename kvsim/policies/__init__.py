"""The policies by name, one file per paper.

A new policy is one file here and its lines in `catalogue.py`. `policy` builds one from its name.
"""

from kvsim.policies.catalogue import CATALOGUE, Entry, Preset
from kvsim.policies.naming import Description, declared, describe, has_parameter, names, policy
from kvsim.policies.naming import parameter_names as parameters

__all__ = [
    "CATALOGUE",
    "Description",
    "Entry",
    "Preset",
    "declared",
    "describe",
    "has_parameter",
    "names",
    "parameters",
    "policy",
]

"""The policies by name, one file per paper.

A new policy is one file here and its lines in `catalogue.py`, of a reader or codec in `access.py`.
`policy` builds one from its name.
"""

from kvsim.policies.access import ACCESS
from kvsim.policies.catalogue import CATALOGUE
from kvsim.policies.description import Description, describe
from kvsim.policies.entry import Entry, Preset
from kvsim.policies.naming import (
    access_names,
    as_policies,
    as_policy,
    declared,
    has_parameter,
    names,
    policy,
    variants,
)
from kvsim.policies.naming import parameter_names as parameters

__all__ = [
    "ACCESS",
    "CATALOGUE",
    "Description",
    "Entry",
    "Preset",
    "access_names",
    "as_policies",
    "as_policy",
    "declared",
    "describe",
    "has_parameter",
    "names",
    "parameters",
    "policy",
    "variants",
]

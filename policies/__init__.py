"""Built-in policies, one file per decision.

Law of this package: import nothing of minedraft but `request`, `sequence`, `batch` and `policy`.
"""

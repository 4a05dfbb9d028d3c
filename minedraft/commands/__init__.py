"""What the commands of the command line do, one file each.

Law of this package: worlds, policies and whatever they need are imported inside functions, so that a command pays
for nothing that it doesn't use, and `minedraft` works without the extras.
"""

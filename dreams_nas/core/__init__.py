"""What every package stands on: errors, files, seeds, configs, device identity, provenance.

Imports nothing else of dreams_nas, and no torch.
"""

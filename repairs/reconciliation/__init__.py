"""Reconciliation: sweeps that find stuck, lost and forgotten work, and put right what can be put right by itself.

``kinds`` names the sweeps, ``running`` runs one, ``runs`` is the record of it, ``sweeping`` what every part of a sweep
works with. Each part decides apart from applying, pages by key, and counts what the database says it changed.
"""

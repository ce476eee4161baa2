"""Measurements, as ratios taken side by side in one run. ``python -m bench [NAME ...]``; see bench/README.md."""

"""Grafana dashboards and Prometheus rules for Outrider; not part of the installed package."""

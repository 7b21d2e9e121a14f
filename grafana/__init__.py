"""What Prometheus and Grafana need to watch a server; see docs/reference/metrics.md."""

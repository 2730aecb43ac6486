"""The figures of `/metrics`, for Prometheus."""

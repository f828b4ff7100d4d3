"""The model as maths over deepinfer.ops. Knows no device names and no cache policy (docs/architecture.md)."""

"""verify's rules: plain functions that yield findings."""

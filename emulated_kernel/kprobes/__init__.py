"""The generic probe engine: registry, aggregation, arming, hits."""

"""Events as guest code: handler programs for fetching, filtering and recording, and where these write."""

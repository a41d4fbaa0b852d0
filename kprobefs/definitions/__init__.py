"""Files of probe definitions: reads, applies and saves them."""

"""Images and videos from strangers: looked at before they are decoded, and never more than fits. Used by http."""

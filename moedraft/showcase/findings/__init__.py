"""What a demo or a comparison found: figures with intervals, sentences, a picture and a page."""

"""Behind `moedraft demo` and `moedraft bench`: the shipped prompts, measurements, a stream, a report."""

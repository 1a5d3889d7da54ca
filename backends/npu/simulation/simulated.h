/* What the simulated runtime and the simulated collectives share.
   Both declare their own prototypes; no CANN header or code is used. */

#ifndef SIMULATED_H
#define SIMULATED_H

#define EXPORT __attribute__((visibility("default")))

/* Remember why a call fails, for the error that torch-npu raises, and return the code. */
int failure(int code, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Return a whole number from the environment. */
long setting(const char *name, long otherwise);

#endif

/* Base64 (RFC 4648, standard alphabet), as JSON carries bytes. */
#ifndef MIZAN_TRACES_BASE64_H
#define MIZAN_TRACES_BASE64_H

#include <stdbool.h>
#include <stddef.h>

/* Decodes `length` characters into `out`, which has room for 3 bytes per 4 characters begun.
 * Padding may be missing; white space is not allowed. False: not base64. */
bool mz_base64_decode(const char *text, size_t length, unsigned char *out, size_t *size);

#endif

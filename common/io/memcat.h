/* The one enumeration of memory categories (DESIGN section 4, memory). Every command prints these.
 */
#ifndef MIZAN_IO_MEMCAT_H
#define MIZAN_IO_MEMCAT_H

typedef enum mz_memcat {
    MZ_MEM_WEIGHTS,
    MZ_MEM_GRADIENTS,
    MZ_MEM_OPTIMIZER_STATE,
    MZ_MEM_REPLICAS,
    MZ_MEM_ACTIVATIONS,
    MZ_MEM_TOKEN_BUFFERS,
    MZ_MEM_TEMPORARIES,
    MZ_MEM_WORKSPACE,
    MZ_MEM_COMMUNICATION,
    MZ_MEM_CONTEXT,
    MZ_MEM_CATEGORIES
} mz_memcat;

const char *mz_memcat_name(mz_memcat category); /* "weights", "gradients", ... */

#endif
